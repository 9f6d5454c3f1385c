"""SIGKILL at random moments of a real run, each resumed: the script of 50 such kills, with three of them."""

import pytest

from scripts import kill_resume


@pytest.mark.megatron
def test_three_kills_change_neither_the_document_order_nor_a_bit_of_the_losses(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kill_resume.py", "3", "--seed", "3", "--iterations", "24"])
    kill_resume.main()
    assert "3 kills, each resumed: documents and losses equal" in capsys.readouterr().out
