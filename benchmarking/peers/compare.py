"""Seconds and peak memory of a learning step of evogrpo, TRL and AgileRL on the same work.

    python benchmarking/peers/compare.py [--precisions float32 bfloat16] [--settings short
    long-prompt long-completion] python benchmarking/peers/compare.py --systems evogrpo-1
    --micro-batches evogrpo-1=16 --rounds 1 --steps 1  # short

Installs TRL and AgileRL into environments of their own under `benchmarking/.peers/` (about 9 GB;
the releases are in `environments.py`, torch is the one that `constraints.txt` pins). Then all
systems take turns, round after round, each at its fastest micro-batch, which is found before the
rounds. Writes `runs/peers.md`, and each step to `runs/peers.json`.

All systems do the same work: SmolLM2-135M-Instruct in float32 or bfloat16, LoRA of rank 16 in
float32 on all linear layers, per agent and step 2 prompts x 8 completions, KL weight 0.04, one
AdamW step, no gradient checkpointing. A step lasts from sampling to the updated weights; the first
step of each run is left out. `--settings gemma3 --model FOLDER` takes Gemma 3 270M instead.

Peers run at the settings that are fastest here with an equal result: reference log-probs from the
base with its adapter off, old log-probs from the update's own forward pass, all groups sampled in
one batch. `agilerl-defaults` runs at AgileRL's defaults, and `agilerl-8` trains 8 agents, for their
memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarking.peers import environments, workload  # the path is set above
from benchmarking.records import write_record

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
ANCHOR = "evogrpo-8"  # every ratio is against evogrpo with a population of 8, in the same precision


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One row of the table.

    Attributes:
        script: Runner beside this file.
        peer: Key of `environments.REQUIREMENTS`; None = the Python that runs this script.
        agents: Agents in the process.
        micro_batches: Samples per pass of a learning step to try before the rounds; the fastest is
            kept.
        defaults: Run at the system's defaults instead of the fastest settings of equal result.
    """

    script: str
    peer: str | None
    agents: int
    micro_batches: tuple[int, ...]
    defaults: bool = False


# One agent's whole batch is 16. It is AgileRL's default; TRL's is 8. A population's whole batch is
# 16 for each agent.
CONTESTANTS: dict[str, Contestant] = {
    ANCHOR: Contestant(script="run_evogrpo.py", peer=None, agents=8, micro_batches=(16, 32, 64)),
    "trl": Contestant(script="run_trl.py", peer="trl", agents=1, micro_batches=(16, 8)),
    "agilerl": Contestant(script="run_agilerl.py", peer="agilerl", agents=1, micro_batches=(16, 8)),
    "agilerl-defaults": Contestant(
        script="run_agilerl.py", peer="agilerl", agents=1, micro_batches=(16, 8), defaults=True
    ),
    "evogrpo-1": Contestant(script="run_evogrpo.py", peer=None, agents=1, micro_batches=(16, 8)),
    "agilerl-8": Contestant(script="run_agilerl.py", peer="agilerl", agents=8, micro_batches=(16,)),
}
DEFAULT_SYSTEMS = tuple(name for name in CONTESTANTS if name != "agilerl-8")
Row = tuple[str, str]
"""A contestant and a precision."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Hardware and length of the runs.

    Attributes:
        folder: Cache for environments and the runs' logs.
        base_model: Folder of the base model.
        pythons: The interpreter of each contestant.
        threads: Threads for every system alike.
        steps: Learning steps to measure in a run, after one that is left out.
        setting: Key of `workload.SETTINGS`.
        micro_batches: Micro-batches to try instead of the contestant's own, by contestant.
        device: One of `workload.DEVICES`.
        clock: Key of `workload.CLOCKS`.
    """

    folder: Path
    base_model: Path
    pythons: Mapping[str, Path]
    threads: int
    steps: int
    setting: str
    micro_batches: Mapping[str, tuple[int, ...]]
    device: str
    clock: str

    def run(self, name: str, precision: str, micro_batch: int, label: str) -> dict[str, Any]:
        """Run one contestant once.

        Returns:
            What its runner reports, with `seconds`: its median seconds per agent per learning step.

        Raises:
            SystemExit: If the runner fails; the message ends with its last lines.
        """
        contestant = CONTESTANTS[name]
        out, log = (
            self.folder / "logs" / f"{self.setting}-{name}-{precision}-{label}.{suffix}"
            for suffix in ("json", "log")
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        command = [
            str(self.pythons[name]),
            str(HERE / contestant.script),
            "--model",
            str(self.base_model),
        ]
        command += [
            "--steps",
            str(self.steps),
            "--micro-batch",
            str(micro_batch),
            "--agents",
            str(contestant.agents),
        ]
        command += ["--threads", str(self.threads), "--out", str(out)] + [
            "--defaults"
        ] * contestant.defaults
        command += ["--setting", self.setting, "--precision", precision, "--device", self.device]
        command += ["--clock", self.clock]
        print(
            f"{self.setting}, {label}: {name} in {precision}, micro-batch {micro_batch} ...",
            end=" ",
            flush=True,
        )
        environment = dict(os.environ)
        if contestant.peer is not None:
            environment.pop("PYTHONPATH", None)  # a peer sees its own packages only
        with log.open("w", encoding="utf-8") as stream:
            done = subprocess.run(
                command, stdout=stream, stderr=subprocess.STDOUT, env=environment, check=False
            )
        if done.returncode != 0:
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise SystemExit(
                f"{name} failed with status {done.returncode}; its whole output is in {log}\n{tail}"
            )
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        report["seconds"] = statistics.median(report["step_seconds"]) / report["agents"]
        print(f"{report['seconds']:.2f} s per agent per step", flush=True)
        return report


def prepare(
    systems: Sequence[str], folder: Path, constraints: Path, installed: Mapping[str, Path]
) -> dict[str, Path]:
    """Return the interpreter of each contestant; install missing packages."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    pythons = {}
    for name in systems:
        peer = CONTESTANTS[name].peer
        if peer is None:
            pythons[name] = Path(sys.executable)
        else:
            pythons[name] = installed.get(peer) or environments.install(peer, folder, constraints)
    return pythons


def demo_model() -> Path:
    """Return the folder of the demo model; another process unpacks it, to save memory here."""
    code = (
        "from evogrpo.members.language.loading import demo_model_folder; print(demo_model_folder())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(done.stdout.splitlines()[-1])


def measure(bench: Bench, rows: Sequence[Row], rounds: int) -> Iterator[dict[str, Any]]:
    """Choose each row's micro-batch, then run all of them in turn, round after round.

    Taking turns spreads the machine's noise over all of them.

    Yields:
        All measurements so far, after every run.
    """
    work = workload.SETTINGS[bench.setting]
    result: dict[str, Any] = {
        "threads": bench.threads,
        "work": {
            "setting": bench.setting,
            "prompts": len(work.prompts),
            "prompt_tokens": work.prompt_tokens,
            "group_size": workload.GROUP_SIZE,
            "completion_tokens": work.completion_tokens,
            "beta": workload.BETA,
            "lora_rank": workload.LORA_RANK,
        },
        "trials": {" ".join(row): [] for row in rows},
        "runs": {" ".join(row): [] for row in rows},
    }
    chosen = {}
    for row in rows:
        candidates = bench.micro_batches.get(row[0], CONTESTANTS[row[0]].micro_batches)
        trials = result["trials"][" ".join(row)]
        for micro_batch in candidates if len(candidates) > 1 else ():
            trials.append(bench.run(*row, micro_batch, f"trial-{micro_batch}"))
            yield result
        chosen[row] = (
            min(trials, key=lambda trial: trial["seconds"])["micro_batch"]
            if trials
            else candidates[0]
        )
    for number in range(1, rounds + 1):
        for row in rows:
            result["runs"][" ".join(row)].append(bench.run(*row, chosen[row], f"round-{number}"))
            yield result


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the comparison as a Markdown table.

    Seconds are medians over all measured steps, with the smallest and largest median of a round;
    ratios are taken between medians, with the smallest and largest ratio within a round. Memory is
    the largest peak of a run.
    """
    lines = [
        (
            "| system | precision | agents | micro-batch | s / agent / step | times evogrpo,"
            " population 8 | peak memory | versions |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, reports in runs.items():
        name, precision = row.split()
        anchor = f"{ANCHOR} {precision}"
        of_rounds = [report["seconds"] for report in reports]
        seconds = pooled(reports)
        ratio = "–"
        if anchor in runs:
            within = [
                time / report["seconds"]
                for time, report in zip(of_rounds, runs[anchor], strict=True)
            ]
            ratio = f"{seconds / pooled(runs[anchor]):.2f} ({min(within):.2f} to {max(within):.2f})"
        first = reports[0]
        peak = max(report["peak_bytes"] for report in reports) / 2**30
        versions = ", ".join(
            f"{package} {version}" for package, version in first["versions"].items()
        )
        lines.append(
            f"| {name} | {precision} | {first['agents']} | {first['micro_batch']} | {seconds:.2f}"
            f" ({min(of_rounds):.2f} to {max(of_rounds):.2f}) | {ratio} | {peak:.2f} GiB |"
            f" {versions} |"
        )
    return "\n".join(lines)


def pooled(reports: Sequence[Mapping[str, Any]]) -> float:
    """Return the median seconds per agent over the measured steps of all rounds."""
    seconds: list[float] = [
        step / report["agents"] for report in reports for step in report["step_seconds"]
    ]
    return statistics.median(seconds)


def tried(words: str) -> tuple[str, tuple[int, ...]]:
    """Read NAME=N,N as a contestant and its micro-batches."""
    name, _, sizes = words.partition("=")
    if name not in CONTESTANTS or not all(
        size.isdigit() and int(size) for size in sizes.split(",")
    ):
        raise argparse.ArgumentTypeError(f"must be like trl=8 or evogrpo-8=16,64, got {words!r}")
    return name, tuple(int(size) for size in sizes.split(","))


def interpreter(words: str) -> tuple[str, Path]:
    """Read PEER=PATH as a peer and the Python that has its packages."""
    peer, _, path = words.partition("=")
    if peer not in environments.REQUIREMENTS or not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(
            f"must be like trl=/usr/bin/python3, a program that exists, got {words!r}"
        )
    return peer, Path(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=CONTESTANTS,
        default=DEFAULT_SYSTEMS,
        metavar="NAME",
        help=f"which to run, in this order, of {', '.join(CONTESTANTS)}",
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=workload.SETTINGS,
        default=["short"],
        metavar="NAME",
        help=f"lengths of prompts and completions, one after another, of "
        f"{', '.join(workload.SETTINGS)}",
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=workload.PRECISIONS,
        default=["float32"],
        metavar="NAME",
        help=f"of the base model, of {', '.join(workload.PRECISIONS)}",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="times that each system is run, in turn with the others",
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="learning steps measured in a run, after one left out"
    )
    parser.add_argument(
        "--micro-batches",
        nargs="+",
        type=tried,
        default=[],
        metavar="NAME=N[,N]",
        help="those that are tried for a system; a single one is taken without trial",
    )
    parser.add_argument(
        "--device", choices=workload.DEVICES, default="cpu", help="device of the models"
    )
    parser.add_argument(
        "--clock",
        choices=workload.CLOCKS,
        default="wall",
        help="time of a step; the processor's on a machine that is not idle",
    )
    parser.add_argument(
        "--pythons",
        nargs="+",
        type=interpreter,
        default=[],
        metavar="PEER=PATH",
        help="a Python that has a peer's packages, such as trl=/usr/bin/python3",
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads for every system alike"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=HERE.parent / ".peers",
        help="folder for environments and logs",
    )
    parser.add_argument(
        "--constraints",
        type=Path,
        default=REPOSITORY / "constraints.txt",
        help="file that pins torch",
    )
    parser.add_argument(
        "--model", type=Path, help="folder of the base model; evogrpo's demo model if not given"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/peers.json"), help="JSON file to write"
    )
    parser.add_argument(
        "--install-only", action="store_true", help="prepare the environments and stop"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if min(arguments.rounds, arguments.steps, arguments.threads) < 1:
        raise SystemExit("--rounds, --steps and --threads must be at least 1")
    if arguments.device != "cpu" and any(name.startswith("agilerl") for name in arguments.systems):
        raise SystemExit(
            "AgileRL's runner is for CPUs: name other --systems, such as evogrpo-8 evogrpo-1 trl"
        )
    folder = arguments.cache.absolute()  # not resolved: a virtual environment's python is a link
    pythons = prepare(arguments.systems, folder, arguments.constraints, dict(arguments.pythons))
    if arguments.install_only:
        return
    base_model = (arguments.model or demo_model()).absolute()
    rows = [(name, precision) for name in arguments.systems for precision in arguments.precisions]
    out = arguments.out.absolute()
    texts = {}
    results: dict[str, Any] = {}
    for setting in arguments.settings:
        bench = Bench(
            folder=folder,
            base_model=base_model,
            pythons=pythons,
            threads=arguments.threads,
            steps=arguments.steps,
            setting=setting,
            micro_batches=dict(arguments.micro_batches),
            device=arguments.device,
            clock=arguments.clock,
        )
        for result in measure(bench, rows, arguments.rounds):
            results[setting] = result
            write_record(out, results)
        work = workload.SETTINGS[setting]
        head = f"{setting}: {work.prompt_tokens} tokens to read, {work.completion_tokens} to write"
        texts[setting] = f"{head}\n\n{table(results[setting]['runs'])}"
        out.with_suffix(".md").write_text("\n\n".join(texts.values()) + "\n", encoding="utf-8")
        print(f"\n{texts[setting]}\n", flush=True)
    print(f"written to {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
