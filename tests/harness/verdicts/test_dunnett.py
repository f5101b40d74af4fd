import pytest

from harness.verdicts.dunnett import probability, quantile

# Dunnett 1964, New tables for multiple comparisons with a control, Biometrics 20: two-sided, correlation 1/2.
TABLES = {
    0.05: {
        5: {1: 2.57, 2: 3.03, 3: 3.29, 5: 3.62, 9: 3.97},
        10: {1: 2.23, 2: 2.57, 3: 2.76, 5: 2.99, 9: 3.24},
        20: {1: 2.09, 2: 2.38, 3: 2.54, 5: 2.73, 9: 2.95},
        60: {1: 2.00, 2: 2.27, 3: 2.41, 5: 2.58, 9: 2.77},
        10**6: {1: 1.96, 2: 2.21, 3: 2.35, 5: 2.51, 9: 2.69},
    },
    0.01: {
        5: {1: 4.03, 2: 4.63, 3: 4.98, 5: 5.41, 9: 5.89},
        20: {1: 2.85, 2: 3.13, 3: 3.29, 5: 3.48, 9: 3.69},
        10**6: {1: 2.58, 2: 2.79, 3: 2.92, 5: 3.06, 9: 3.22},
    },
}


@pytest.mark.parametrize("error", TABLES)
def test_published_tables(error):
    for degrees, row in TABLES[error].items():
        for comparisons, published in row.items():
            # Printed with two decimals; some entries of that time are one off in the last.
            assert quantile(comparisons, 0.5, degrees, error) == pytest.approx(published, abs=0.0101), (
                degrees,
                comparisons,
            )


@pytest.mark.parametrize(
    ("degrees", "error", "published"),
    [(2, 0.05, 4.30265), (3, 0.05, 3.18245), (5, 0.01, 4.03214), (10, 0.001, 4.58689), (40, 0.05, 2.02108)],
)
def test_one_comparison_is_student(degrees, error, published):
    assert quantile(1, 0.9, degrees, error) == pytest.approx(published, abs=2e-4)
    assert 1 - probability(published, 1, 0.0, degrees) == pytest.approx(error, rel=1e-3)


def test_independent_comparisons_without_noise_in_the_scale_are_sidaks():
    assert probability(2.5, 4, 0.0, 10**6) == pytest.approx(probability(2.5, 1, 0.0, 10**6) ** 4, abs=1e-5)


def test_more_comparisons_less_correlation_and_fewer_degrees_all_widen():
    assert quantile(8, 0.3, 20, 0.05) > quantile(7, 0.3, 20, 0.05)
    assert quantile(8, 0.3, 20, 0.05) > quantile(8, 0.5, 20, 0.05) > quantile(1, 0.0, 20, 0.05)
    assert quantile(8, 0.3, 6, 0.05) > quantile(8, 0.3, 20, 0.05) > quantile(8, 0.3, 20, 0.1)


@pytest.mark.parametrize("arguments", [(0, 0.5, 5, 0.05), (2, 1.0, 5, 0.05), (2, 0.5, 1, 0.05), (2, 0.5, 5, 0.0)])
def test_arguments_without_meaning_are_refused(arguments):
    with pytest.raises(ValueError, match="no quantile"):
        quantile(*arguments)
