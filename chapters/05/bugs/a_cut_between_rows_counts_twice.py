"""A share that begins where a row begins is taken for a cut inside this row.

The row then has a split more than it has pieces: the first is empty, and the last lands in the
place of the next row's item. A number of splits that does not fit the splits is the usual mistake
where work is dealt out evenly. In tile-ai/tilelang#2902 the last split may be one without work, and
then nobody finishes the tile.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "keys of some rows are nobody's, those of others are read twice"
KILLED_BY = (
    "test_shares.py::test_three_rows_and_four_programs",
    "test_shares.py::test_fewer_tiles_than_programs",
)


def apply(stage):
    rewrite(
        stage,
        "shares._cut_shares_kernel",
        "next_cut = _cuts_before(my_tile + 1, all_tiles, shares)",
        "next_cut = _cuts_before(my_tile, all_tiles, shares)",
    )
