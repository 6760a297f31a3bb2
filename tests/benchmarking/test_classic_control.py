"""The classic-control benchmark: reading runs and reporting them at their budgets."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarking" / "classic_control.py"


def write_run(
    folder: Path, name: str, seed: int, curve: list[tuple[int, float, float, float]]
) -> None:
    budgets = {"steps": 1000, "seconds": 4.0}
    content = {
        "task": "CartPole-v1",
        "budgets": budgets,
        "seed": seed,
        "clock": "processor",
        "curve": curve,
    }
    path = folder / "CartPole-v1" / f"{name}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def report(folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["--table-only", "--folder", str(folder), "--seeds", "0", "1", "2"]
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False
    )


def test_runs_are_compared_at_their_budgets(tmp_path):
    for seed in range(3):
        # Fast but wasteful: solved after 2 of 4 seconds, and after 5000 steps where 1000 are
        # granted.
        fast = [
            (0, 9.0, 0.0, 20.0),
            (900, 9.0, 1.0, 100.0 + seed),
            (5000, 9.0, 2.0, 500.0),
            (9000, 9.0, 5.0, 0.0),
        ]
        # Slow but efficient: solved after 800 steps, which take 20 seconds.
        slow = [
            (0, 9.0, 0.0, 20.0),
            (400, 9.0, 3.0, 200.0 + seed),
            (800, 9.0, 20.0, 480.0),
            (1001, 9.0, 30.0, 0.0),
        ]
        write_run(tmp_path, "grpo", seed, fast)
        write_run(tmp_path, "sb3-ppo", seed, slow)

    done = report(tmp_path)

    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    assert rows["grpo"]["steps"]["scores"] == [100.0, 101.0, 102.0]
    assert rows["grpo"]["seconds"]["scores"] == [500.0] * 3
    assert rows["grpo"]["seconds"]["solved_after"] == 2.0
    assert rows["sb3-ppo"]["steps"]["scores"] == [480.0] * 3
    assert rows["sb3-ppo"]["seconds"]["scores"] == [200.0, 201.0, 202.0]
    assert rows["sb3-ppo"]["steps"]["interval"] == {"value": 480.0, "low": 480.0, "high": 480.0}
    row = (
        "| CartPole-v1 | sb3-ppo | 3 | **480 (480 to 480)** | 3/3 | 201 (200 to 202) | 0/3 | 800 |"
        " 20.0 |"
    )
    assert row in done.stdout
