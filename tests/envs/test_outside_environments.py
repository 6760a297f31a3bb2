"""The classes for OpenEnv and TextArena in docs/howto/tools.md, with the real packages."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from evogrpo.records import Conversation
from tests.docs.test_examples import blocks
from tests.docs.test_links import ROOT
from tests.envs.test_environment_gym import call, converse, encoded, gym, reply_texts

SERVER = Path(__file__).with_name("openenv_server.py")


def from_page(name):
    """Return the namespace of the block in docs/howto/tools.md that defines a class."""
    (block,) = [
        text for _, kind, text in blocks(ROOT / "docs/howto/tools.md") if f"class {name}:" in text
    ]
    names = {}
    exec(block, names)  # noqa: S102 (the page is the test's subject)
    return names


def start_server(port):
    """Start an OpenEnv server in its own process; return it once it listens."""
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)])
    for _ in range(1200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert process.poll() is None
            time.sleep(0.1)
        else:
            return process
    raise TimeoutError(port)


@pytest.mark.slow
def test_an_openenv_server_on_loopback_is_played():
    pytest.importorskip("openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = from_page("RemoteGuess")
    names["URLS"] = iter(lambda: f"http://127.0.0.1:{port}", None)
    server = start_server(port)
    try:
        rows = [{"seed": seed} for seed in range(30)]
        env = gym(
            rows=rows,
            environment_factory=names["RemoteGuess"],
            max_turns=21,
            on_reward_error="exclude",
        )
        batch = env.make_batch("train", [0, 1])
        # 1. Play: several sessions at once, each with its own number.
        tries = [call("guess", value=number) + "<eos>" for number in range(1, 21)]
        played = [converse(batch, *tries, row=row, start=row) for row in range(2)]
        found = [reply_texts(batch, each).index("=right") for each in played]
        for row, wrong_tries in enumerate(found):
            replies = reply_texts(batch, converse(batch, *tries, row=2 + row, start=row))
            assert replies == ["=too low"] * wrong_tries + ["=right"] + ["=too high"] * (
                19 - wrong_tries
            )
        reached = [
            converse(batch, *tries[: wrong_tries + 1], row=4 + row, start=row)
            for row, wrong_tries in enumerate(found)
        ]
        assert batch.score([*played, *reached]).rewards.tolist() == [0, 0, 1, 1]
        # 2. Lose the server in a conversation: it is excluded.
        batch = env.make_batch("train", [0])
        conversation = converse(batch, tries[0])
        server.kill()
        server.wait()
        completions = (*conversation.completions, encoded(batch, tries[1]))
        lost = Conversation(row=0, start=0, completions=completions, replies=conversation.replies)
        assert batch.respond([lost]) == [None]
        # 3. After a restart, environments connect again.
        server = start_server(port)
        right = converse(batch, tries[found[0]], row=1)
        with pytest.warns(UserWarning, match="1 of 2 .*lost"):
            np.testing.assert_array_equal(batch.score([lost, right]).rewards, [np.nan, 1])
        env.close()
    finally:
        server.kill()
        server.wait()


def test_a_textarena_game_is_played():
    pytest.importorskip("textarena")
    options = {
        "environment_factory": from_page("Game")["Game"],
        "max_turns": 12,
        "environment_workers": 0,
    }
    env = gym(rows=30, **options)
    batch = env.make_batch("train", [0])
    assert "between 1 and 20" in env.tokenizer.decode(batch.prompts[0])
    # Bisection finds the number; it is the same in every conversation of a start.
    low = 1
    high = 20
    guesses = []
    while True:
        guesses.append(call("move", action=f"[{(low + high) // 2}]") + "<eos>")
        conversation = converse(batch, *guesses, row=len(guesses))
        reply = reply_texts(batch, conversation)[-1]
        if "over" in reply:
            break
        if "higher" in reply:
            low = (low + high) // 2 + 1
        else:
            high = (low + high) // 2 - 1
    assert len(guesses) <= 5
    started = converse(batch, "x<eos>", row=9)
    assert batch.score([conversation, started]).rewards.tolist() == [1, 0]
    again = converse(batch, *guesses, call("move", action="[1]") + "<eos>", "x<eos>", row=10)
    assert "The game is over." in reply_texts(batch, again)[-1]
