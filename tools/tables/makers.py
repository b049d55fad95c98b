"""Names what makes the tables of pages."""

from tools.tables.cards import all_cards, cards
from tools.tables.marks import Maker
from tools.tables.options import options
from tools.tables.peers import peers

MAKERS: dict[str, Maker] = {
    "all_cards": all_cards,
    "cards": cards,
    "options": options,
    "peers": peers,
}
