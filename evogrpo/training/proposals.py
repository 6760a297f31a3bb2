"""Proposals: new texts of task settings, which a function or a language model writes.

A strategy that mutates a text setting leaves its new text open. The proposer of the run writes it
from the parent's text and from training completions of the parent. The form of a proposer is that
of GEPA (arXiv:2507.19457), so a function written for the packages `gepa` or DSPy works unchanged.
"""

import copy
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, PlainValidator

from evogrpo.algorithms.population import check_settings
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.config.task_settings import MAX_TEXT
from evogrpo.evolution.history import MemberRecord
from evogrpo.evolution.mutation import TO_PROPOSE
from evogrpo.evolution.plan import Plan
from evogrpo.extras import require
from evogrpo.interruption import Stop
from evogrpo.reporting.records import Example
from evogrpo.storage.journal import all_events
from evogrpo.text import class_name, one_line, shorten, shown
from evogrpo.validation import (
    PositiveFloat,
    PositiveInt,
    Text,
    Whole,
    check_call,
    dump,
    settings,
    validate,
)
from evogrpo.warnings import warn

if TYPE_CHECKING:
    from evogrpo.members.language.vllm_server import Server
    from evogrpo.training.trainer import Trainer

ProposalFunction = Callable[
    [dict[str, str], dict[str, list[dict[str, Any]]], list[str]], Mapping[str, str]
]
"""Function `(candidate, reflective_dataset, components_to_update) -> {name: new text}`.

- `candidate`: the parent's texts by the name of the setting, without the group.
- `reflective_dataset`: for each name the same list of completions, each a dictionary of "Inputs",
  "Generated Outputs" and "Feedback".
- `components_to_update`: the names whose texts are wanted.
"""
MAX_EXAMPLES = 8
"""Completions of a member that are kept for its children's proposals."""
MAX_SHOWN = 4000
"""Characters of a question or completion that a proposer sees."""
POLL_SECONDS = 0.2
"""Longest wait for a proposal without checking for a stop."""


def _checked_function(value: Any) -> ProposalFunction:
    """Return a proposal function; raise ValueError for anything else."""
    names = ("candidate", "reflective_dataset", "components_to_update")
    if isinstance(value, type) or not callable(value):
        raise ValueError(f"must be a function of ({', '.join(names)}), got {shown(value)}.")
    if inspect.iscoroutinefunction(value):
        raise ValueError("must be a function without async, got a coroutine function.")
    check_call("must be a function of", value, *names)
    function: ProposalFunction = value
    return function


@settings
class Proposer:
    """Writer of new texts of task settings whose search space says `proposed: true`.

    Attributes:
        function: The function; see `ProposalFunction`.
        timeout: Time limit of one call, in seconds.
    """

    function: Annotated[ProposalFunction, PlainValidator(_checked_function)]
    timeout: PositiveFloat = 120.0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A text that was asked for, as it stands in the journal.

    Attributes:
        generation: Generation after which it was asked for.
        index: Index of the child.
        name: Full name of the task setting.
        before: Text of the parent.
        after: Text of the child; that of the parent if the proposal was refused.
        refused: Reason why there is no new text; None if there is.
        seen: Completions that the proposer saw, in its form.
    """

    generation: Whole
    index: Whole
    name: str
    before: str
    after: str
    refused: str | None = None
    seen: tuple[Mapping[str, Any], ...] = ()

    @property
    def key(self) -> tuple[int, int, str, str]:
        """Generation, child, setting and text of the parent: equal ones are asked for once."""
        return self.generation, self.index, self.name, self.before


def check_proposer(space: HyperparameterConfig, proposer: Proposer | None) -> None:
    """Raise ValueError unless a run has a proposer if, and only if, its search space needs one."""
    proposed = [name for name, parameter in space.items() if parameter.proposed]
    if proposed and proposer is None:
        raise ValueError(
            f"{proposed[0]} is proposed, but the run has no proposer. Give proposer=, or"
            " {choices: [...]} with at least two texts."
        )
    if proposer is not None and not proposed:
        raise ValueError(
            "The run has a proposer, but no text of the search space is proposed. Set proposed:"
            " true at a task setting task.NAME."
        )


# ---- proposals of a plan


def propose_texts(run: "Trainer", plan: Plan) -> Plan:
    """Return a plan with a proposed text for each text that mutation has left open.

    Proposals that the journal already has, also those of a part of the run that a kill has undone,
    are not asked for again. A collective: rank 0 asks.
    """
    generation = run.run_state.generation
    children = []
    for child in plan.children:
        settings = child.hyperparameters.task_settings
        names = [name for name, value in settings.items() if value == TO_PROPOSE]
        if not names:
            children.append(child)
            continue
        before = {name: str(child.changes[name][0]) for name in names}
        # Plain values: rank 0 sends them to the others.
        with run.stop_request.interruptible():
            answers = run.population.processes.gather_results(
                partial(_proposals, run, child, generation, before)
            )
        found = [validate(Proposal, values) for values in answers[0]]
        children.append(_with_texts(child, found))
    return replace(plan, children=tuple(children))


def _with_texts(child: MemberRecord, found: Sequence[Proposal]) -> MemberRecord:
    """Return a child with its proposed texts; a refused one leaves the parent's text."""
    changes = dict(child.changes)
    for each in found:
        if each.after == each.before:
            del changes[each.name]
        else:
            changes[each.name] = (each.before, each.after)
    texts = {each.name: each.after for each in found}
    return replace(child, hyperparameters=child.hyperparameters.with_values(texts), changes=changes)


def _proposals(
    run: "Trainer", child: MemberRecord, generation: int, before: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the proposals for a child as plain values: those of the journal, or new ones.

    Empty on ranks other than 0.
    """
    if not run.population.processes.is_rank_zero:
        return []
    # 1. Look the proposals up in the journal.
    wanted = [
        Proposal(generation=generation, index=child.index, name=name, before=text, after=text)
        for name, text in before.items()
    ]
    known = run.known_proposals
    if all(each.key in known for each in wanted):
        found = [known[each.key] for each in wanted]
    else:
        # 2. Ask, with what the parent has sampled.
        assert child.parent is not None
        by_index = {agent.index: agent for agent in run.population.agents}
        parent = by_index[child.parent]
        seen = [_record(example) for example in run.run_state.reflections[parent.slot]]
        texts, problem = _ask(run, before, seen)
        # 3. Check the texts.
        found = []
        for each in wanted:
            after = texts.get(each.name, "")
            refused = problem or _refusal(run, child, each.name, after, each.before)
            if refused is not None:
                after = each.before
                if not run.warned_of_proposals:
                    run.warned_of_proposals = True
                    reason = refused.removesuffix(".")
                    warn(
                        f"Member {child.index} keeps its parent's {each.name}: {reason}. Further"
                        " refused texts are in the journal only."
                    )
            found.append(replace(each, after=after, refused=refused, seen=tuple(seen)))
    # 4. Record the proposals before they are used, so that they are never asked for again.
    for each in found:
        run.record_proposal(each)
    return [dump(each) for each in found]


def _ask(
    run: "Trainer", before: Mapping[str, str], seen: list[dict[str, Any]]
) -> tuple[dict[str, str], str | None]:
    """Call the proposer; return the texts by full name, and the problem if there are none."""
    proposer = run.proposer
    assert proposer is not None  # checked before the run
    short = {name.removeprefix("task."): text for name, text in before.items()}
    # The function may change what it gets.
    dataset = {name: copy.deepcopy(seen) for name in short}
    answer = _call_with_limit(
        lambda: proposer.function(dict(short), dataset, list(short)),
        proposer.timeout,
        run.stop_request,
    )
    if isinstance(answer, BaseException):
        return {}, f"the proposer failed: {class_name(answer)}: {one_line(answer)}"
    if not isinstance(answer, Mapping):
        return {}, f"the proposer must return a mapping of names to texts, got {shown(answer)}"
    texts = {}
    for name, text in answer.items():
        if name in short:
            texts[f"task.{name}"] = text
    if not texts:
        names = shown([str(name) for name in answer])
        return {}, f"the proposer must return a text for {' or '.join(short)}, got {names}"
    return texts, None


def _call_with_limit(call: Callable[[], Any], seconds: float, stop: Stop) -> Any:
    """Return the result of a call, or its exception; a TimeoutError if it takes too long.

    A thread cannot be ended, so a call that takes too long goes on, and its result is ignored.
    """
    results: list[Any] = []

    def work() -> None:
        """Keep the result of the call, or its error."""
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 (user code may raise anything)
            results.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    waited = 0.0
    while thread.is_alive() and waited < seconds:
        stop.check()
        pause = min(POLL_SECONDS, seconds - waited)
        thread.join(pause)
        waited += pause
    if results:
        return results[0]
    return TimeoutError(f"no answer within {seconds:g} seconds")


def _refusal(run: "Trainer", child: MemberRecord, name: str, text: Any, before: str) -> str | None:
    """Return the reason why a text cannot be used, or None."""
    if not isinstance(text, str) or not text.strip():
        return f"the proposal must be a text, got {shown(text)}"
    if text == before:
        return "the proposal is the text of the parent"
    if len(text) > MAX_TEXT:
        return f"the proposal has {len(text):,} characters, more than {MAX_TEXT:,}"
    # The environment and the members check the text, as those of the configuration.
    try:
        member = child.hyperparameters.with_values({name: text})
        check_settings(run.env, run.population.space, [member])
        run.population.members.check(run.env)
    except ValueError as error:
        return one_line(error)
    return None


# ---- what a proposer sees


def _record(example: Example) -> dict[str, Any]:
    """Return a completion in GEPA's form."""
    lines = []
    for name, value in example.rewards.items():
        if value is not None:
            lines.append(f"{name}: {value:.3g}")
    for name, reason in example.feedback.items():
        lines.append(f"{name}: {reason}")
    return {
        "Inputs": shorten(example.prompt, MAX_SHOWN),
        "Generated Outputs": shorten(example.completion, MAX_SHOWN),
        "Feedback": "\n".join(lines),
    }


def stored_proposals(content: bytes) -> dict[tuple[int, int, str, str], Proposal]:
    """Return all proposals of a journal by key, also those in a part that was undone."""
    found = {}
    for event in all_events(content):
        if event["event"] == "proposal":
            values = dict(event)
            for name in ("event", "time"):
                values.pop(name, None)
            proposal = validate(Proposal, values, "journal, proposal event")
            found[proposal.key] = proposal
    return found


# ---- language models that write proposals


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _Message


class _Answer(BaseModel):
    choices: list[_Choice]


@settings
class Reflection:
    """Language model behind an OpenAI-compatible endpoint, which writes a text for a prompt.

    Redirects are not followed, and an answer is read up to `MAX_ANSWER` bytes.

    Attributes:
        url: Address of the server, with or without `/v1`.
        model: Name of the model there.
        api_key_env: Environment variable with the key; None = no key is sent.
        max_tokens: Maximum number of tokens of an answer.
        timeout: Time limit of a call in seconds, repetitions after failures included.
    """

    url: Text
    model: Text
    api_key_env: Text | None = None
    max_tokens: PositiveInt = 2000
    timeout: PositiveFloat = 60.0

    def __post_init__(self) -> None:
        self._server()  # raises ValueError for invalid settings
        if self.api_key_env is not None and self.api_key_env not in os.environ:
            raise ValueError(f"api_key_env names {self.api_key_env}, which is not set. Export it.")

    def _server(self) -> "Server":
        """Client of the server; raises ValueError if its settings are invalid."""
        # Small networks are trained without the packages of language models.
        from evogrpo.members.language.vllm_server import Server

        return Server(
            self.url.rstrip("/").removesuffix("/v1"),
            self.timeout,
            key_name=self.api_key_env,
            name="server of the proposer",
        )

    def __call__(self, prompt: str) -> str:
        """Return the model's answer.

        Raises:
            VLLMError: If there is no valid answer in time.
        """
        from evogrpo.members.language.vllm_server import VLLMError

        server = self._server()
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
        }
        status, content = server.call("/v1/chat/completions", body, ended=threading.Event())
        if status != HTTPStatus.OK:
            raise VLLMError(f"{self.url} answered with status {status}: {server.shown(content)}")
        answer = server.parsed(_Answer, content)
        if not answer.choices:
            raise VLLMError(f"{self.url} returned no answer.")
        return answer.choices[0].message.content


def gepa_proposer(reflection: Callable[[str], str]) -> ProposalFunction:
    """Return the default proposer of the package `gepa`.

    Args:
        reflection: Language model that writes a text for a prompt.

    Raises:
        ImportError: If `gepa` is not installed.

    Source: GEPA (arXiv:2507.19457), `InstructionProposalSignature` of its package.
    """
    require("The proposer gepa", "gepa")
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    def model(prompt: str | list[dict[str, Any]]) -> str:
        """Return the answer of the language model to a prompt."""
        # Prompts with images are messages; completions have none.
        assert isinstance(prompt, str)
        return reflection(prompt)

    def propose(
        candidate: dict[str, str],
        reflective_dataset: dict[str, list[dict[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Return new texts by name, which the language model writes."""
        texts = {}
        for name in components_to_update:
            # These are the names in the prompt of the package.
            inputs = {
                "current_instruction_doc": candidate[name],
                "dataset_with_feedback": reflective_dataset[name],
            }
            texts[name] = InstructionProposalSignature.run(lm=model, input_dict=inputs)[
                "new_instruction"
            ]
        return texts

    return propose
