"""The paper's numbers agree with each other as far as its own text says they do."""

import pytest

from nsr.report import paper

TOKENS = paper.rows("tab:token-main")


def cells(label: str, metric: str) -> dict[tuple[str, str, str, str], float]:
    return {
        (row["experiment"], row["merger"], row["point"], row["variant"]): row[metric]
        for row in paper.rows(label)
        if metric in row
    }


def test_every_table_is_complete() -> None:
    counts = {label: len(paper.rows(label)) for label in paper.labels()}
    assert counts["tab:token-main"] == counts["tab:token-additional"] == 3 * (1 + 12 * 2)
    assert counts["tab:heterophily-main"] == 5 * 3 * 2
    assert counts["tab:residual-ablation"] == counts["tab:source-ablation"] == 12 * 3
    assert counts["tab:feature-spatial-ablation"] == 12 * 4
    assert counts["tab:zinc-results"] == 6
    assert counts["tab:graph-source-ablation"] == 12
    assert counts["tab:nsr-null-violation"] == 9


def test_gains_are_differences_and_34_of_36_are_positive() -> None:
    miou = cells("tab:token-main", "miou")
    gains = cells("tab:token-main", "delta")
    for key, gain in gains.items():
        assert miou[key] - miou[(*key[:3], "original")] == pytest.approx(gain, abs=0.0101)
    assert sum(gain > 0 for gain in gains.values()) == 34


def test_gap_closure_follows_from_miou() -> None:
    """Up to the rounding of both, which a small gap magnifies."""
    miou = cells("tab:token-main", "miou")
    for key, closed in cells("tab:token-additional", "gap_closure").items():
        base, full = miou[(*key[:3], "original")], miou[(key[0], "none", "1.0x", "original")]
        rounding = 100 * 0.01 * (1 + abs(closed) / 100) / (full - base) + 0.05
        assert 100 * (miou[key] - base) / (full - base) == pytest.approx(closed, abs=rounding)


@pytest.mark.parametrize("label", ["tab:residual-ablation", "tab:feature-spatial-ablation", "tab:source-ablation"])
def test_ablations_repeat_the_main_table(label: str) -> None:
    main = cells("tab:token-main", "miou")
    for key, value in cells(label, "miou").items():
        if key[3] in ("original", "nsr"):
            assert value == pytest.approx(main[key] / 100, abs=1e-6)


def test_an_ambiguous_question_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="names 2 rows"):
        paper.value("tab:zinc-results", {"backbone": "gcn"}, "test_mae")


def test_what_the_paper_does_not_have_is_none() -> None:
    assert paper.value("tab:zinc-results", {"backbone": "gat", "variant": "nsr"}, "test_mae") == (None, None)
