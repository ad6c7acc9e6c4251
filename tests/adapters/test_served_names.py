"""Names that adapters are served by."""

from __future__ import annotations

from punica_core.adapters.served_names import close_matches


def test_close_matches_of_many_names_look_at_the_neighbours() -> None:
    names = tuple(f"adapter-{index:05d}" for index in range(20_000))
    matches = close_matches("adapter-1234S", names)
    assert len(matches) == 3
    assert all(match.startswith("adapter-123") for match in matches)
    assert close_matches("zzz", names) == []
