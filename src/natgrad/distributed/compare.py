"""What ranks have said, compared: one error on all, which names who said what."""

from collections import defaultdict
from collections.abc import Mapping, Sequence


def require_same(what: str, said: Sequence[str]) -> None:
    """Raise the same error on all ranks unless all say the same."""
    ranks = _by_value(said)
    if len(ranks) > 1:
        lines = (f"  ranks {who}: {text}" for text, who in ranks.items())
        raise ValueError(f"Ranks have different {what}:\n" + "\n".join(lines))


def require_same_options(said: Sequence[Mapping[str, str]]) -> None:
    """Raise the same error on all ranks unless options are equal, by name."""
    lines = differences(said)
    if lines:
        raise ValueError("Ranks have different options:\n" + "\n".join(lines))


def differences(said: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each name of which ranks have said different things."""
    lines: list[str] = []
    for name in dict.fromkeys(name for each in said for name in each):
        ranks = _by_value([each.get(name, "not given") for each in said])
        if len(ranks) > 1:
            values = (f"{text} on ranks {who}" for text, who in ranks.items())
            lines.append(f"  {name}: {', '.join(values)}")
    return lines


def _by_value(said: Sequence[str]) -> dict[str, list[int]]:
    """The ranks that have said each thing."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(said):
        ranks[text].append(rank)
    return ranks
