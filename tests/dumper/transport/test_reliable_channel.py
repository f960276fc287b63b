"""A stream that loses any of its messages, in either direction, still hands over each once and in order."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from tapscope.dumper.transport.reliable_channel import ReceivedMessages, SentMessages


@given(st.lists(st.sampled_from(["send", "deliver", "lose", "beat"]), max_size=200))
def test_channel_each_message_is_handled_once_and_in_order_whatever_is_lost(events: list[str]) -> None:
    out, into = SentMessages[int](), ReceivedMessages()
    wire: deque[int] = deque()  # numbers of messages on their way; a break loses all of them
    handled: list[int] = []

    def deliver() -> None:
        while wire:
            number = wire.popleft()
            if into.accept(number):
                handled.append(number)
            elif into.is_missing(number + 1, again=False):
                wire.extend(out.since(into.count))

    def beat() -> None:
        deliver()
        if into.is_missing(out.count, again=True):
            wire.extend(out.since(into.count))
            deliver()
        out.acknowledge(into.count)

    for event in events:
        if event == "send":
            wire.append(out.count)
            out.keep(out.count)
        elif event == "deliver":
            deliver()
        elif event == "lose":
            wire.clear()
        else:
            beat()
            assert len(out) == 0
    beat()
    assert handled == list(range(out.count))
    assert len(out) == 0


def test_channel_what_came_ahead_of_a_gap_is_asked_for_once() -> None:
    into = ReceivedMessages()
    assert not into.accept(1)
    assert into.is_missing(2, again=False)
    assert not into.is_missing(3, again=False)
    assert into.is_missing(3, again=True)
    assert into.accept(0)
    assert not into.accept(0)
    assert into.is_missing(3, again=False)
    assert into.accept(1)
    assert into.accept(2)
    assert not into.is_missing(3, again=True)


def test_channel_what_arrived_is_given_back_once() -> None:
    out = SentMessages[str]()
    for item in "abc":
        out.keep(item)
    assert out.acknowledge(2) == ["a", "b"]
    assert out.acknowledge(2) == []
    assert out.since(0) == ["c"]
    assert out.since(3) == []
    out.forget()
    assert len(out) == 0
    assert out.count == 3
