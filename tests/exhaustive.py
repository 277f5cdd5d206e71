"""What `make test` leaves to `make test-all`: of each test named here it runs the first so many cases.

The cases that are left out, or whole tests (0), say again what another case or a faster test says. They are here and
not beside the tests so that the cut can be read in one place. `conftest.py` gives them the marker `exhaustive`.
"""

QUICK_CASES = {
    "core/test_step.py::test_placement_and_order_change_no_bit": 27,  # every layout, in fp32
}
