"""Names what makes the tables of pages."""

from tools.tables.marks import Maker
from tools.tables.options import options
from tools.tables.peers import peers

MAKERS: dict[str, Maker] = {
    "options": options,
    "peers": peers,
}
