"""The state of training in `state.json`."""

import json

from mtrain.checkpoint.state import Plan, TrainState
from mtrain.data.epochs.schedule import Position

PLACE = {"epoch": 3, "epoch_window": 2, "next_batch": 7, "stage_starts": [0, 2], "stage_step": 40}


def test_the_position_and_the_sums_keep_the_keys_of_earlier_versions():
    state = TrainState(step=50, position=Position(3, 2, 7, (0, 2), 40), metric_sums={"loss": 1.5})
    values = json.loads(json.dumps(state.to_json()))
    assert {key: values[key] for key in PLACE} == PLACE and values["window"] == {"loss": 1.5}
    assert "position" not in values and "metric_sums" not in values
    assert TrainState.from_json(values) == state


def test_a_state_of_a_version_without_windows_and_stages_is_at_their_start():
    assert TrainState.from_json({"step": 5, "epoch": 1, "next_batch": 4}).position == Position(1, 0, 4)


def test_fixed_shapes_can_be_read_again():
    state = TrainState(fixed_shapes=[64, 128, 30])
    assert TrainState.from_json(state.to_json()) == state


def test_a_plan_can_be_read_again():
    state = TrainState(step=7, plan=Plan(5, 4.5, 90, 20, (10.0, None)))
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state
