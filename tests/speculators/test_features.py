"""Features: what is stored is what the target computes, however the work is shared."""

import torch

from strop.speculators.features import (
    default_aux_layers,
    extract,
    feature_path,
    load_features,
)


def test_shared_prefixes_change_the_work_and_not_the_result(lesson):
    for sample in lesson.samples:
        with torch.no_grad():
            whole = lesson.target.model.model(
                torch.from_numpy(sample.tokens_T)[None], output_hidden_states=True
            )
        aux_TA, final_TH = load_features(lesson.features, sample)
        expected = torch.cat([whole.hidden_states[k][0] for k in lesson.target.aux_layers], dim=-1)
        torch.testing.assert_close(aux_TA.float(), expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(final_TH.float(), whole.last_hidden_state[0], atol=1e-2, rtol=1e-2)


def test_a_prefix_is_computed_once_and_finished_samples_never_again(lesson, tmp_path):
    distinct = {tuple(s.tokens_T[: i + 1].tolist()) for s in lesson.samples for i in range(len(s.tokens_T))}
    assert extract(lesson.target, lesson.samples, tmp_path) == len(distinct)
    assert extract(lesson.target, lesson.samples, tmp_path) == 0
    feature_path(tmp_path, lesson.samples[0]).unlink()
    seen: list[tuple[int, int]] = []
    assert extract(lesson.target, lesson.samples, tmp_path, lambda *a: seen.append(a)) == len(
        lesson.samples[0].tokens_T
    )
    assert seen == [(12, 12)]


def test_extraction_stops_when_told_and_leaves_whole_files(lesson, tmp_path):
    answers = iter([True, True, False])
    extract(lesson.target, lesson.samples, tmp_path, keep_going=lambda: next(answers))
    files = list(tmp_path.iterdir())
    assert len(files) == 2 and all(f.suffix == ".safetensors" for f in files)


def test_the_default_streams_are_those_of_the_engine():
    assert default_aux_layers(30) == (2, 15, 27)
    assert default_aux_layers(4) == (1, 2)
