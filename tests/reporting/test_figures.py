"""The figure is drawn for runs of every shape and keeps matplotlib's settings."""

import io

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from evogrpo import report
from evogrpo.cli.running import show_files


@pytest.mark.parametrize(
    "shape",
    [
        {"size": 1, "generations": 6, "evolve": ()},
        {
            "size": 8,
            "generations": 3,
            "evolve": ("lr", "group_size", "loss_type", "beta"),
            "failures": [(2, 3)],
        },
        {"size": 1, "generations": 2, "evolve": ("loss_type",)},  # an axis with one name
        {"size": 3, "generations": 0, "test": False},  # nothing but the base to put into the legend
        {"size": 2, "generations": 2, "failures": [(1, 0), (1, 1), (2, 0), (2, 1)], "test": False},
        {"size": 2, "generations": 2, "task": "$x_{ <b> \x1b[0m \0 漢字 %s" + "long " * 100},
    ],
    ids=lambda shape: "-".join(f"{value}" for value in shape.values())[:40],
)
@pytest.mark.filterwarnings("error", "ignore:Glyph")
def test_every_shape_of_run_is_drawn(tmp_path, fake_run, shape):
    run = report(fake_run(tmp_path, **shape))
    image = imread(io.BytesIO(run._repr_png_()))
    assert image.shape[1] == 1430  # 11 inches at 130 dots per inch
    assert image.shape[0] > 700
    assert 0.005 < np.mean(image[..., :3].min(axis=-1) < 0.9) < 0.5  # neither blank nor filled
    figure = run.figure
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    for number, box in enumerate(boxes):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 + 1
        for next_box in boxes[number + 1 :]:
            across = min(box.x1, next_box.x1) - max(box.x0, next_box.x0)
            along = min(box.y1, next_box.y1) - max(box.y0, next_box.y0)
            assert min(across, along) < 3, (box, next_box)  # points


def test_a_report_displays_itself_and_writes_nothing_until_asked(tmp_path, fake_run):
    folder = fake_run(tmp_path / "run", generations=2)
    shown = report(folder)
    assert "RunReport(" in repr(shown)
    shown.figure.savefig(tmp_path / "figure.svg")
    assert "</svg>" in (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["journal.jsonl"]
    settings = dict(matplotlib.rcParams)
    assert shown.write() == folder / "report.html"
    assert dict(matplotlib.rcParams) == settings
    assert (folder / "report.png").exists()


def broken(*_, **__):
    raise IndexError("tuple index out of range")


def test_an_error_in_the_report_does_not_fail_the_run(tmp_path, fake_run, monkeypatch, capsys):
    monkeypatch.setattr("matplotlib.figure.Figure", broken)
    show_files(Console(width=200), fake_run(tmp_path), "language")
    assert "not written: tuple index out of range" in capsys.readouterr().out
