"""Names what makes the tables of pages."""

from tools.tables.cards import all_cards, cards, compared_cards
from tools.tables.expert_classes import expert_classes
from tools.tables.layers import layers
from tools.tables.links import flexlink
from tools.tables.marks import Maker
from tools.tables.options import options
from tools.tables.peers import peers
from tools.tables.planned import hosts_cost, hosts_published, hosts_take, kept
from tools.tables.replicas import evened, few_ranks, kinds, local, rates
from tools.tables.sections import degrees, gathers

MAKERS: dict[str, Maker] = {
    "all_cards": all_cards,
    "cards": cards,
    "compared_cards": compared_cards,
    "degrees": degrees,
    "evened": evened,
    "expert_classes": expert_classes,
    "flexlink": flexlink,
    "gathers": gathers,
    "hosts_cost": hosts_cost,
    "hosts_published": hosts_published,
    "hosts_take": hosts_take,
    "kept": kept,
    "kinds": kinds,
    "few_ranks": few_ranks,
    "layers": layers,
    "local": local,
    "options": options,
    "peers": peers,
    "rates": rates,
}
