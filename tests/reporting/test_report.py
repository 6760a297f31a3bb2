"""`evogrpo.report` in a notebook."""

import io

import matplotlib.image
import pytest

import evogrpo


def test_a_report_displays_itself_and_has_a_figure(tmp_path, fake_run):
    folder = fake_run(tmp_path / "run", generations=2)
    report = evogrpo.report(folder)
    assert "RunReport(" in repr(report)
    assert matplotlib.image.imread(io.BytesIO(report._repr_png_())).ndim == 3
    titles = [axes.get_title(loc="left") for axes in report.figure.axes]
    report.figure.savefig(tmp_path / "figure.svg")
    assert titles
    assert "</svg>" in (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["journal.jsonl"]  # nothing is written
    assert report.write() == folder / "report.html"
    assert (folder / "report.png").exists()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"journal"):
        evogrpo.report(tmp_path)
