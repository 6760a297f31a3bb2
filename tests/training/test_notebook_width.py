"""Width of a run's tables in notebooks."""

from evogrpo.training.console import NOTEBOOK_WIDTH, console_for
from evogrpo.training.display import NARROW


def test_notebook_width_is_a_page_unless_jupyter_columns_is_set(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.delenv("JUPYTER_COLUMNS", raising=False)
    assert console_for(None).width == NOTEBOOK_WIDTH < NARROW
    monkeypatch.setenv("JUPYTER_COLUMNS", "140")
    assert console_for(True).width == 140
    assert console_for(False) is None
