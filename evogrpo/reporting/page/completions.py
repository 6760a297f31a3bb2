"""What members wrote: of every generation's best member one completion, of the last generation all that were kept."""

from evogrpo.history.records import GenerationReport
from evogrpo.history.steps import Example
from evogrpo.markup import escape, folded
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import number_text, shorten

_LONGEST_TEXT = 4000  # characters of a prompt or a completion
_MOST_TEXT = 100_000  # characters of all of them; where there are more, each is cut shorter


def completions(summary: RunSummary) -> str:
    """Return the section; nothing where no completion was kept."""
    shown = {generation.generation: _chosen(generation, summary) for generation in summary.generations}
    shown = {number: examples for number, examples in shown.items() if examples}
    if not shown:
        return ""
    texts = sum(len(examples) for examples in shown.values()) * 2
    limit = max(200, min(_LONGEST_TEXT, _MOST_TEXT // texts))
    parts = [
        folded(
            f"Generation {number}",
            "".join(_example(example, limit) for example in examples),
            opened=number == max(shown),
        )
        for number, examples in shown.items()
    ]
    lead = "One of each generation's best member, of the last generation one of every member; texts are untrusted."
    return f'<section><h2>Sample completions</h2>\n<p class="quiet">{lead}</p>\n' + "\n".join(parts) + "</section>"


def _chosen(generation: GenerationReport, summary: RunSummary) -> tuple[Example, ...]:
    if generation is summary.generations[-1]:
        return generation.examples
    best = [example for example in generation.examples if example.index == generation.best.index]
    return tuple(best or generation.examples[:1])


def _example(example: Example, limit: int) -> str:
    prompt, completion = (escape(shorten(text, limit)) for text in (example.prompt, example.completion))
    earned = f"reward {number_text(example.reward)}, advantage {number_text(example.advantage)}"
    cut = ", cut off at its length" if example.truncated else ""
    # A newline right after <pre> is dropped by browsers, so one is given to be dropped.
    return (
        f'<p class="quiet">member #{escape(example.index)}, prompt</p><pre>\n{prompt}</pre>'
        f'<p class="quiet">completion, {escape(earned)}{cut}</p><pre>\n{completion}</pre><hr>'
    )
