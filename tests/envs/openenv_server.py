"""An OpenEnv server with numbers to guess: `python openenv_server.py PORT`."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    value: int


class Answer(Observation):
    text: str


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.number = random.Random(seed).randint(1, 20)
        return Answer(text="Guess a number from 1 to 20.")

    def step(self, action, timeout_s=None, **options):
        found = action.value == self.number
        if found:
            text = "right"
        elif action.value < self.number:
            text = "too low"
        else:
            text = "too high"
        return Answer(text=text, reward=float(found), done=found)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Answer, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
