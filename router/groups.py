"""Which requests belong together, where they go, and how many more of them are to come. Pure.

State. For each of the newest groups: its home (the replica that its members go to), how many members have come, how
many are expected, and the work that is reserved for the missing ones at its home.

Rules.
- A group is what the message names, or, where nothing names one, all requests with the same prompt.
- When the first member lands, its missing siblings' work is reserved at its home; each that comes takes its share.
- How many siblings an unnamed group will have is learned: the mean size of groups that began long enough ago for their
  last members to have come, which is learned too: in a large fleet many groups begin before one is complete. Groups
  whose prompt continues something (a conversation's next turn) are counted apart from those that begin afresh.
- Siblings that have not come after RESERVATION_SECONDS are not coming: their reservation is given back.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec

Key = str | tuple[str, str, int]
"""A group's name, or its prompt's adapter, salt and hash."""

REMEMBERED = 65_536
"""Groups that are remembered, newest first: about 30 MB."""

RESERVATION_SECONDS = 30.0
"""How long a reservation is kept after the last member came."""

COMPLETE_AFTER = 16
"""An unnamed group's size is believed once this many others more have begun after it than members lately came late."""

LATEST = 1024
"""A member that comes after more than this many other groups have begun says nothing of how late members come."""

LATE_FADE = 0.01
"""How fast the latest member is forgotten, at each group that begins."""

SIZES_KEPT = 128
"""The expected size is the mean of this many groups'."""


class Group(msgspec.Struct):
    """One group."""

    home: int
    """The slot of the replica that its members go to, -1 when that is gone."""
    came: int
    missing: float
    each: float
    """The work of one missing member."""
    since: float
    """When the last member came."""
    reserved: float = 0.0
    """The work of all missing members: a whole number, so that adding and taking away leaves nothing."""
    number: int = 0
    """Its place among the unnamed groups, in the order in which they began."""
    sizes: _Sizes | None = None
    """Where its size is learned from, None for a named group."""


class _Sizes:
    """How many members groups have, as far as they are old enough to tell."""

    def __init__(self) -> None:
        self._young: deque[Group] = deque()
        self._known: deque[int] = deque()
        self._sum = 0
        self._begun = 0
        self._late = 0.0
        """How many groups began, lately at most, between a group's first member and a later one."""

    def mean(self) -> float:
        return self._sum / len(self._known) if self._known else 1.0

    def joined(self, group: Group) -> None:
        late = self._begun - group.number
        if self._late < late <= LATEST:
            self._late = late

    def begin(self, group: Group) -> None:
        self._begun += 1
        group.number, group.sizes = self._begun, self
        self._late -= self._late * LATE_FADE
        self._young.append(group)
        while len(self._young) > COMPLETE_AFTER + self._late:
            size = self._young.popleft().came
            self._known.append(size)
            self._sum += size
            if len(self._known) > SIZES_KEPT:
                self._sum -= self._known.popleft()


class Groups:
    """The groups of one router. It says what is reserved where, and leaves adding it to the loads to the caller."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Key, Group] = OrderedDict()
        self._open: OrderedDict[Key, None] = OrderedDict()
        self._sizes = {True: _Sizes(), False: _Sizes()}

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, key: Key) -> Group | None:
        return self._groups.get(key)

    def expected_size(self, *, fresh: bool) -> float:
        """Members that an unnamed group is expected to have in all."""
        return self._sizes[fresh].mean()

    def begin(
        self, key: Key, slot: int, siblings: int | None, each: float, now: float, *, fresh: bool = True
    ) -> tuple[Group, Group | None]:
        """A group's first member has been placed at `slot`: what is `reserved` now counts there.

        `siblings`: members in all, None where nobody says. `each`: the work of one missing member. `fresh`: whether
        its prompt continues nothing. Returns the group, and one that was forgotten for it, if any.
        """
        missing = max(0.0, (self.expected_size(fresh=fresh) if siblings is None else siblings) - 1.0)
        group = self._groups[key] = Group(slot, 1, missing, each, now, float(round(missing * each)))
        if siblings is None:
            self._sizes[fresh].begin(group)
        if group.reserved:
            self._open[key] = None
        if len(self._groups) <= REMEMBERED:
            return group, None
        old_key, old = self._groups.popitem(last=False)
        self._open.pop(old_key, None)
        return group, old

    def join(self, key: Key, group: Group, slot: int, now: float, *, again: bool = False) -> None:
        """A further member has been placed at `slot`, which is the group's home from now on, reservation and all.

        `again`: it is no further one, but one that came before.
        """
        group.since = now
        group.home = slot
        if again:
            return
        group.came += 1
        if group.sizes is not None:
            group.sizes.joined(group)
        if group.missing > 0:
            group.missing = max(0.0, group.missing - 1.0)
            group.reserved = float(round(group.missing * group.each))
            if group.reserved:
                self._open.move_to_end(key)
            else:
                self._open.pop(key, None)

    def expire(self, now: float) -> list[tuple[int, float]]:
        """Give up on siblings that are not coming: (slot, work that is no longer reserved there) of each group."""
        given_back = []
        while self._open:
            key = next(iter(self._open))
            group = self._groups[key]
            if now - group.since <= RESERVATION_SECONDS:
                break
            del self._open[key]
            given_back.append((group.home, group.reserved))
            group.missing = group.reserved = 0.0
        return given_back

    def abandon(self, slot: int) -> None:
        """A replica is gone: its groups have no home, and what was reserved there is void."""
        for key, group in self._groups.items():
            if group.home == slot:
                group.home = -1
                group.missing = group.reserved = 0.0
                self._open.pop(key, None)

    def reserved(self) -> list[tuple[Key, Group]]:
        """The groups that have work reserved."""
        return [(key, self._groups[key]) for key in self._open]
