"""DeepSpeed steps within its backward pass: a gradient that is not finite stops the run right after."""

from tests.e2e.launching import fork


def test_zero3_stops_at_a_gradient_that_is_not_finite_on_both_ranks(tmp_path):
    fork("cpu_zero3", ["-m", "tests.helpers.bad_input_worker", str(tmp_path), "gradient"])
    for rank in range(2):
        error, engine = (tmp_path / f"{rank}.txt").read_text().splitlines()
        # DeepSpeed says infinity of either
        assert error.startswith("RuntimeError: NaN or infinity in the gradient (its norm is inf) at update 2, in its")
        assert engine == "DeepSpeedEngine 1"
