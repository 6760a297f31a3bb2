"""Reward functions that return a reason, in a module that worker processes can import."""

from types import SimpleNamespace


def pair(completions, **_):
    return [(len(text), f"{len(text)} characters") for text in completions]


def mapping(completions, **_):
    return [{"score": len(text), "feedback": f"{len(text)} characters"} for text in completions]


def attributes(completions, **_):
    return [
        SimpleNamespace(score=len(text), feedback=f"{len(text)} characters") for text in completions
    ]


def plain(completions, **_):
    return [1.0 for _ in completions]


def single(completion, answer, question):
    return 0.5, "fine"


FORMS = {each.__name__: each for each in (pair, mapping, attributes, plain)}
