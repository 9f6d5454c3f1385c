"""`wlb-megatron watch`: what a run's log says."""

import json
from pathlib import Path
from typing import Any

import pytest

from wlb_megatron.cli import main
from wlb_megatron.report import watch
from wlb_megatron.report.watch import RunLog, summary


def line(iteration: int, **changes: Any) -> str:
    odd = iteration % 2
    figures = f"""iteration {iteration} tokens 1000 consumed_tokens {1000 * iteration} train_iterations 800
    seconds_left 3600.0 time {1.8e9 + iteration} started 1.8e9 measured_ms 500.0 predicted_ms 400.0
    arrival_ms {472.0 + 8 * odd} tflops_per_gpu 411.6 tokens_per_second_per_gpu 250.0 step_over_ideal 1.2
    imbalance 1.05 cp_imbalance 1.01 dp_imbalance 1.02 plan_wait_ms 0.5 token_delay 0.4 waiting_documents 7
    most_epochs 0.25 memory_peak_gb {61.5 - odd} update_skipped 0 recomputed_share 0.25 peak_gib {20.0 + odd}
    planned_peak_gib 21.5 available_gib 30.0 slowest_rank 3 slowest_excess 0.2""".split()
    values = dict(zip(figures[::2], map(json.loads, figures[1::2]), strict=True))
    return json.dumps({**values, "slowest_host": "node<7>", "epochs": None} | changes) + "\n"


@pytest.fixture()
def log(tmp_path):
    """600 of 800 iterations; the process was started again at 300, from the checkpoint of 250."""
    lines = [line(at) for at in range(1, 301)]
    lines += [line(at, started=1.9e9, tokens=900 + at % 2 * 200) for at in range(251, 601)]
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    return tmp_path / "steps.jsonl"


def test_the_terminal_shows_what_the_log_says(log, capsys):
    assert main(["watch", str(log)]) == 0
    shown = dict(summary(read(log)))
    assert shown == {
        "iteration": "600 of 800 (75.0%)",
        "time left": "60 min",
        "tokens": "600,000, 0.25 epochs",
        "step": "500 ms, 2,000 tokens/s, 250 a GPU (412 TFLOP/s)",
        "measured over predicted": "1.250",
        "gain over arrival order": "1.190 so far, predicted",
        "step over ideal": "1.200 (max/mean work: micro-batches 1.050, DP 1.020, CP 1.010)",
        "slowest rank": "3 on node<7>: 20% over the median, at most 100 ms a step",
        "memory, last rank": "61.5 GB at most",
        "layers recomputed": "25.0%",
        "memory of a step": "21.0 GiB at most, 21.5 planned of 30.0",
        "mean token delay": "0.400 iterations, 7 pieces wait",
        "tokens an iteration": "900 to 1,100",
        "wait for plans": "0.5 ms a step",
        "restarts": "1",
    }
    printed = capsys.readouterr().out
    assert all(label in printed and text in printed for label, text in shown.items()) and "] 75.0%" in printed


def read(log: Path) -> RunLog:
    reader = RunLog(log)
    assert reader.read()
    return reader


def test_a_line_that_is_being_written_waits_and_a_new_file_replaces_all(log):
    reader = read(log)
    assert not reader.read()
    with log.open("a") as file:
        file.write(line(601)[:40])
    assert not reader.read() and max(reader.rows) == 600
    with log.open("a") as file:
        file.write(line(601)[40:])
    assert reader.read() and max(reader.rows) == 601
    log.write_text(line(1))
    assert reader.read() and list(reader.rows) == [1] and len(reader.starts) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"iteration": 1}',
        '{"iteration": 1, "tokens": "8"}',
        '{"iteration": Infinity, "tokens": 8}',
        "[1]",
        "[" * 200_000,
    ],
    ids=lambda text: text[:24],
)
def test_a_line_without_the_figures_of_an_iteration_is_no_log(text, tmp_path, capsys):
    (tmp_path / "other").write_text(f"{text}\n")
    assert main(["watch", str(tmp_path / "other")]) == 2
    assert "is no --wlb-log" in capsys.readouterr().err


def test_a_blank_line_half_a_line_and_a_figure_of_another_kind_are_left_out(tmp_path, capsys):
    line = '{"iteration": 1, "tokens": 8, "measured_ms": "5"}\n'
    (tmp_path / "log").write_text(f'{line}\n{{"iteration": 2, "tok{line}')
    assert main(["watch", str(tmp_path / "log")]) == 0
    assert "8" in capsys.readouterr().out


def test_what_is_no_log_gets_a_line(tmp_path, capsys):
    (tmp_path / "other").write_text('{"loss": 1}\n')
    assert main(["watch", str(tmp_path / "other")]) == 2
    assert "is no --wlb-log" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "give the file of --wlb-log" in capsys.readouterr().err
    (tmp_path / "new").touch()
    assert main(["watch", str(tmp_path / "new")]) == 0
    assert "none yet" in capsys.readouterr().out


def test_it_follows_a_run_to_its_last_iteration(log, monkeypatch, capsys):
    waits = []

    def wait(seconds: float) -> None:
        waits.append((seconds, capsys.readouterr().out))
        with log.open("a") as file:
            file.write(line(800, seconds_left=0))

    monkeypatch.setattr(watch.time, "sleep", wait)
    assert main(["watch", str(log), "--follow", "--seconds", "3"]) == 0
    ((seconds, first),) = waits
    assert seconds == 3 and "600 of 800 (75.0%)" in first and "800 of 800 (100.0%)" not in first
    assert "800 of 800 (100.0%)" in capsys.readouterr().out


def test_the_option_for_a_page_is_taken_with_a_line_that_names_what_draws_the_figures(log, tmp_path, capsys):
    assert main(["watch", str(log), "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "TensorBoard" in shown.err and "600 of 800" in shown.out
    assert not (tmp_path / "page.html").exists()
