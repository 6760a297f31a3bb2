"""What TensorBoard's HParams plugin shows of a run: a session for every member, with hyperparameters and results.

A session lies in a folder of its own and is appended to after every generation that the member lives through. What lies
there is written anew, from the journal, when a run begins or goes on: what was given up then is gone.
"""

import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import (
    DATA_TYPE_FLOAT64,
    DATA_TYPE_STRING,
    STATUS_FAILURE,
    STATUS_SUCCESS,
    Experiment,
    HParamInfo,
    Interval,
    MetricInfo,
    MetricName,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter

from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.history.records import GenerationReport, MemberReport, TestReport

MEASURES: Mapping[str, str] = {
    "member/fitness": "what it earned last on validation",
    "member/best_fitness": "the most that it ever earned there",
    "member/test": "what it earned in the test at the run's end",
    "member/tokens": "tokens (small networks: transitions) that it processed in its life",
    "member/generations": "generations that it lived through",
}
"""The metrics of a session, by tag, with what they are."""


class MemberSessions:
    """Writes the sessions of a run.

    Args:
        folder: Where they lie, below that of the run's curves; what is in it is removed.
        space: What evolves, for the columns.
        earlier: The generations so far.
    """

    def __init__(self, folder: Path, space: HyperparameterConfig, earlier: Iterable[GenerationReport]) -> None:
        self._folder, self._open = folder, dict[int, tuple[float, int, int]]()
        if folder.exists():
            shutil.rmtree(folder)
        experiment = Experiment(hparam_infos=list(map(_column, space, space.values())), metric_infos=_METRICS)
        self._append("", [_plugin(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment))], 0)
        for report in earlier:
            self.add(report)

    def add(self, report: GenerationReport) -> None:
        """Write what a generation has shown of its members; sessions of those that were replaced end."""
        for index in self._open.keys() - {member.index for member in report.members}:
            self._end(index, report.step, failed=False)
        for member in report.members:
            started = member.index in self._open
            best, tokens, lived = self._open.get(member.index, (float("-inf"), 0, 0))
            if member.fitness is not None:
                best = max(best, member.fitness)
            self._open[member.index] = best, tokens + member.tokens, lived + 1
            values: dict[str, float] = {"member/tokens": tokens + member.tokens, "member/generations": lived + 1}
            if member.fitness is not None:
                values |= {"member/fitness": member.fitness, "member/best_fitness": best}
            first = [] if started else [_start(member)]
            self._append(
                _name(member.index), [*first, *(_number(tag, value) for tag, value in values.items())], report.step
            )
            if member.failed is not None:
                self._end(member.index, report.step, failed=True)

    def test(self, report: TestReport, step: int) -> None:
        """Write what the run's best member earned in the test."""
        self._append(_name(report.index), [_number("member/test", report.after.mean)], step)

    def _end(self, index: int, step: int, *, failed: bool) -> None:
        del self._open[index]
        info = SessionEndInfo(status=STATUS_FAILURE if failed else STATUS_SUCCESS, end_time_secs=time.time())
        data = HParamsPluginData(session_end_info=info)
        self._append(_name(index), [_plugin(metadata.SESSION_END_INFO_TAG, data)], step)

    def _append(self, session: str, values: Iterable[Summary.Value], step: int) -> None:
        path = self._folder / session / "events.out.tfevents.0.members"
        path.parent.mkdir(parents=True, exist_ok=True)
        begins = not path.exists()
        with path.open("ab") as file:
            writer, now = RecordWriter(file), time.time()
            if begins:
                writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            for value in values:
                event = Event(wall_time=now, step=step, summary=Summary(value=[value]))
                writer.write(event.SerializeToString())


_METRICS = [
    MetricInfo(name=MetricName(tag=tag), display_name=tag.partition("/")[2], description=what)
    for tag, what in MEASURES.items()
]


def _name(index: int) -> str:
    return f"{index:05d}"


def _start(member: MemberReport) -> Summary.Value:
    info = SessionStartInfo(start_time_secs=time.time())
    for name, value in member.hyperparameters.to_json().items():
        if isinstance(value, str):
            info.hparams[name].string_value = value
        elif value is not None:
            info.hparams[name].number_value = value
    return _plugin(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info))


def _column(name: str, parameter: Any) -> HParamInfo:
    info = HParamInfo(name=name, type=DATA_TYPE_STRING if parameter.names else DATA_TYPE_FLOAT64)
    if parameter.choices is not None:
        info.domain_discrete.extend(parameter.choices)
    else:
        low, high = parameter.bounds
        info.domain_interval.CopyFrom(Interval(min_value=low, max_value=high))
    return info


def _plugin(tag: str, data: HParamsPluginData) -> Summary.Value:
    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)


def _number(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)
