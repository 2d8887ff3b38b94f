"""Attention rules: which gradients of an attention branch are dropped."""

from typing import NamedTuple


class Rule(NamedTuple):
    """What of the branch has gradients only where it is kept.

    - ``query_rows``: rows of queries, and so of the output.
    - ``key_rows``: rows of keys and values; they are the same rows, so ``query_rows`` is true then too.
    - ``heads``: the contributions of heads.
    """

    name: str
    query_rows: bool
    key_rows: bool
    heads: bool


RULES = {
    rule.name: rule
    for rule in (
        Rule("query", query_rows=True, key_rows=False, heads=False),  # Eq. 19–23
        Rule("qkv", query_rows=True, key_rows=True, heads=False),
        Rule("head", query_rows=False, key_rows=False, heads=True),
        Rule("exact", query_rows=False, key_rows=False, heads=False),  # the MLP alone is sampled
    )
}
