"""What the card of an export says of the images a client was trained on."""

import pytest

from fedprompt.assets import IMAGE_SETS
from fedprompt.inference import model_card

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        (None, "tiny, one of 3 clients"),
        (IMAGE_SETS["groceries"].credit, f"tiny ({IMAGE_SETS['groceries'].credit}), one of 3 clients"),
    ],
)
def test_the_card_credits_images_whose_makers_are_known(credit, expected):
    assert model_card._shape({"source": "tiny", "credit": credit, "clients": 3}) == expected
