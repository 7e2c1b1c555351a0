"""A run's progress: a live bar on a terminal, plain lines without one."""

import io
import sys

import pytest

from natgrad_lab.train.progress import Bar


class Terminal(io.StringIO):
    """Takes what is written; says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def progress(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, **settings) -> str:
    """What a run of 20 steps writes that is evaluated after ten."""
    monkeypatch.setattr(sys, "stderr", stream)
    with Bar("digits-sgd", 20, **settings) as bar:
        for step in range(1, 21):
            bar.advance(step)
            if step == 10:
                bar.say(step, 0.5, accuracy=91.25)
    return stream.getvalue()


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = progress(Terminal(), monkeypatch)
    for part in ("digits-sgd", "━", "20/20", "accuracy 91.25"):
        assert part in shown


def test_without_a_terminal_there_are_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = progress(io.StringIO(), monkeypatch)
    assert shown == "digits-sgd  step 10/20  epoch 0.50  accuracy 91.25\n"


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_other_ranks_show_nothing(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress(stream(), monkeypatch, show=False) == ""
