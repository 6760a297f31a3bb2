"""`evogrpo.report`: a run that a notebook shows by itself."""

import io

import matplotlib.image
import pytest

import evogrpo


def test_a_report_shows_itself_and_is_a_figure_to_go_on_with(tmp_path, fake_run):
    folder = fake_run(tmp_path / "run", generations=2)
    report = evogrpo.report(folder)
    assert "RunReport(" in repr(report)
    assert matplotlib.image.imread(io.BytesIO(report._repr_png_())).ndim == 3
    titles = [axes.get_title(loc="left") for axes in report.figure.axes]
    report.figure.savefig(tmp_path / "figure.svg")
    assert titles
    assert "</svg>" in (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["journal.jsonl"]  # looking leaves nothing behind
    assert report.write() == folder / "report.html"
    assert (folder / "report.png").exists()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"journal"):
        evogrpo.report(tmp_path)
