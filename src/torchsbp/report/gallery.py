"""One HTML page of pictures with captions, which needs no other file."""

import io
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from .page import STYLE, document

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 320
CARDS = """
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 1rem; }
.cards figure { padding: .6rem; } .cards img { height: 180px; object-fit: contain; }
.cards figcaption { margin: .5rem 0 0; overflow-wrap: anywhere; }
.cards figcaption small { display: block; }
"""


class Card(NamedTuple):
    picture: bytes
    """a JPEG file"""
    name: str
    caption: str


def small(picture: "Image") -> bytes:
    """The picture as a JPEG file of at most ``SIDE`` pixels a side."""
    picture = picture.convert("RGB")
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return file.getvalue()


def gallery(cards: Sequence[Card], total: int, unread: Sequence[str]) -> str:
    """The page of ``cards``, the first of ``total`` files; ``unread`` says why further files could not be read."""
    shown = f"{total} files" if len(cards) == total else f"The first {len(cards)} of {total} files"
    body = f'<p>{shown}</p><div class="cards">{"".join(map(figure, cards))}</div>'
    if unread:
        body += f"<h2>Not read</h2><ul>{''.join(f'<li>{escape(reason)}</li>' for reason in unread)}</ul>"
    return document("Predictions", STYLE + CARDS, body)


def figure(card: Card) -> str:
    source = f"data:image/jpeg;base64,{b64encode(card.picture).decode()}"
    return (
        f'<figure><img loading="lazy" alt="{escape(card.name)}" src="{source}">'
        f"<figcaption>{escape(card.caption)}<small>{escape(card.name)}</small></figcaption></figure>"
    )
