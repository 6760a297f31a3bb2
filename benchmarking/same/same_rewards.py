"""The reward of the prompt runs: almost every group has a spread of it, so that every step has something to learn."""


def variety(completion: str, answer: str, question: str) -> float:
    """Reward many different characters, and the answer among them."""
    return len(set(completion)) / 32 + float(answer in completion)
