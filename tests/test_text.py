"""Stop strings and streams of text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.engine.text import StopStrings, TextStream


def _feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    found, shown = StopStrings(stops), ""
    for piece in pieces:
        part, stopped = found.push(piece)
        shown += part
        if stopped:
            return shown, True
    return shown + found.flush(), False


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab", max_size=3), max_size=12))
def test_same_as_a_search_in_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [text.find(stop) for stop in stops if stop in text]
    # Pieces arrive in order, so the stop that is complete first wins, as in a server that streams.
    for n in range(len(pieces) + 1):
        prefix = "".join(pieces[:n])
        ends = [prefix.find(stop) for stop in stops if stop in prefix]
        if ends:
            assert _feed(stops, pieces) == (prefix[: min(ends)], True)
            return
    assert _feed(stops, pieces) == (text, False)


def test_nothing_of_a_partial_stop_is_shown_early() -> None:
    stops = StopStrings(["</end>"])
    assert stops.push("abc</") == ("abc", False)
    assert stops.push("e") == ("", False)
    assert stops.push("x</end") == ("</ex", False)
    assert stops.push(">tail") == ("", True)


class _Letters:
    """A decoder that holds back every second letter, as one does with half a character."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        self.held += chr(token_id)
        if len(self.held) < 2:
            return ""
        return self.flush()

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


def test_stream_shows_what_was_held_when_the_answer_ends() -> None:
    stream = TextStream(_Letters(), ["xyz"])
    for letter in "abcxy":
        assert not stream.push(ord(letter))
    assert stream.take() == "abc"
    stream.close()
    assert stream.take() == "xy"


def test_stream_finds_a_stop_in_what_was_held() -> None:
    stream = TextStream(_Letters(), ["c"])
    for letter in "abc":
        assert not stream.push(ord(letter))
    stream.close()
    assert stream.take() == "ab"
