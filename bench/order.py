"""In which order subjects are measured: every round another one, and every run the same.

What went just before shows in a figure. Pages that a writer through the page cache has given
back are there for the next one, while after a direct writer the memory may have gone back to
the host of a virtual machine, and a buffered save takes several times as long. In a rotated
list each subject follows the same one round after round, and no number of rounds evens that
out. So rounds are drawn (with a fixed seed), and of many draws the one is taken in which the
fewest subjects follow one they followed before, or stand where they stood before. Of seven subjects
or more none follows the same one twice in five rounds; of fewer some do, but none always.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

T = TypeVar("T", bound="Hashable")

_NUM_DRAWS = 500
#: How much worse it is to follow the same one again than to stand in the same place.
_FOLLOWS = 3


def draw_rounds(rounds: Sequence[Sequence[T]], last: T | None = None) -> Iterator[list[T]]:
    """Give an order for each round.

    Args:
        rounds: Who is measured in each round; a round may lack some.
        last: Who was measured before the first round.

    Yields:
        For each round its members, each once.
    """
    source = random.Random(0)  # an order, and the same one each time
    follows: Counter[tuple[T | None, T]] = Counter()
    places: Counter[tuple[int, T]] = Counter()

    def cost(order: Sequence[T]) -> int:
        again = sum(follows[pair] for pair in zip((last, *order), order, strict=False))
        return _FOLLOWS * again + sum(places[place] for place in enumerate(order))

    for members in rounds:
        draws = (source.sample(members, len(members)) for _ in range(_NUM_DRAWS))
        order = min(draws, key=cost)
        follows.update(zip((last, *order), order, strict=False))
        places.update(enumerate(order))
        last = order[-1] if order else last
        yield order
