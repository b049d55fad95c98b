"""Makes what pages have of the cards of trainings, from the records of cards that are kept."""

from tools.bench.cards import summary
from tools.bench.cards.kept import kept_cards
from tools.tables.marks import ROOT


def cards() -> list[str]:
    """The comparison of flashmoe with alltoall, model by model."""
    return summary.summary(kept_cards())


def compared_cards() -> list[str]:
    """The same with forced balance and graphs of pieces."""
    return summary.summary(kept_cards(), has_all=True)


def all_cards(folder: str) -> list[str]:
    """All cards, on a page in a folder of the checkout."""
    return summary.page(kept_cards(), ROOT / folder)
