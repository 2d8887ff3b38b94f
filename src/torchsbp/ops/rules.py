"""Attention rules: which gradients of an attention branch are dropped."""

from typing import NamedTuple


class Rule(NamedTuple):
    """Which parts of an attention branch get gradients only where they are kept (docs/method.md, 3.4).

    - ``query_rows``: rows of queries, and so of the output.
    - ``key_rows``: rows of keys and values. They are the rows of the queries, so ``query_rows`` is true then too.
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
        Rule("exact", query_rows=False, key_rows=False, heads=False),  # only the MLP is sampled
    )
}
