"""Pictures of live objects. Each function returns a matplotlib Figure; ``save`` writes it as SVG.

Read `state` (what of a cache is drawn), `shapes` (the few shapes), then any of the drawings.
"""

from pagedattn.viz.charts import draw_kv_growth, draw_waste
from pagedattn.viz.policies import draw_block_sizes, draw_policies
from pagedattn.viz.pool import draw_pool
from pagedattn.viz.recording import Frame, Recording
from pagedattn.viz.slots import draw_slot_mapping
from pagedattn.viz.style import save
from pagedattn.viz.tables import draw_block_tables

__all__ = [
    "Frame",
    "Recording",
    "draw_block_sizes",
    "draw_block_tables",
    "draw_kv_growth",
    "draw_policies",
    "draw_pool",
    "draw_slot_mapping",
    "draw_waste",
    "save",
]
