"""What a pool that remembers has to do: the oracle of exercise 07, task 3.

Blocks have no numbers and stand in no queue: each has the time at which it was freed, the text that it is found by, and
the names of those who use it. Slow, and short enough to be believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Cell:
    """A block of the oracle: the text that it is found by, who uses it, and when it was freed."""

    freed: int
    text: tuple[int, ...] | None = None
    users: set[str] = field(default_factory=set)


class Books:
    """What a pool has to do, over blocks that have a time instead of a place in a queue."""

    def __init__(self, num_blocks: int, size: int):
        self.size, self.time = size, num_blocks
        self.cells = [Cell(freed=time) for time in range(num_blocks)]
        self.tables: dict[str, list[Cell]] = {}

    def start(self, who: str, tokens: list[int], room: int) -> int | None:
        """Tokens that are found, None when the request does not fit."""
        listed, table = {cell.text: cell for cell in self.cells if cell.text}, []
        while (len(table) + 1) * self.size < len(tokens):
            cell = listed.get(tuple(tokens[: (len(table) + 1) * self.size]))
            if cell is None:
                break
            table.append(cell)
        found, needed = len(table), (len(tokens) + room + self.size - 1) // self.size
        spare = sorted((c for c in self.cells if not c.users and c not in table), key=lambda c: c.freed)
        if needed - found > len(spare):
            return None
        for cell in spare[: needed - found]:
            cell.text = None
            table.append(cell)
        for cell in table:
            cell.users.add(who)
        self.tables[who] = table
        return found * self.size

    def computed(self, who: str, tokens: list[int], n: int) -> None:
        for i in range(n // self.size):
            text = tuple(tokens[: (i + 1) * self.size])
            if all(cell.text != text for cell in self.cells):
                self.tables[who][i].text = text

    def end(self, who: str) -> None:
        for cell in self.tables.pop(who)[::-1]:
            cell.users.discard(who)
            cell.freed, self.time = self.time, self.time + 1
