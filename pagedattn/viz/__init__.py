"""Pictures of live objects. Each function returns a matplotlib Figure; ``save`` writes it as SVG.

Read `state` (what of a cache is drawn), `shapes` (the few shapes), then any of the drawings.
"""

from pagedattn.viz.allocations import Allocation, draw_allocations
from pagedattn.viz.arenas import ArenaRecording
from pagedattn.viz.beams import BeamTree, draw_beam_tree
from pagedattn.viz.chains import draw_hash_chain
from pagedattn.viz.charts import draw_kv_growth, draw_waste
from pagedattn.viz.free_orders import FreeOrder
from pagedattn.viz.hit_rates import draw_hit_rates
from pagedattn.viz.hit_searches import draw_hit_search
from pagedattn.viz.holders import draw_holders
from pagedattn.viz.kernel_blocks import draw_kernel_blocks
from pagedattn.viz.loads import draw_loads
from pagedattn.viz.memory import draw_memory
from pagedattn.viz.passes import draw_fixed_point
from pagedattn.viz.plans import draw_plan
from pagedattn.viz.policies import draw_block_sizes, draw_policies, draw_pool_shares
from pagedattn.viz.pool import draw_pool
from pagedattn.viz.prefixes import draw_shared_prefixes
from pagedattn.viz.queues import draw_free_queue
from pagedattn.viz.ranks import draw_rank_slots
from pagedattn.viz.recording import Frame, Recording
from pagedattn.viz.roofline import draw_roofline
from pagedattn.viz.saved import draw_sharing_saved
from pagedattn.viz.searches import HitSearch
from pagedattn.viz.sharing import draw_copy_on_write, draw_shared_tables
from pagedattn.viz.slots import draw_slot_mapping
from pagedattn.viz.style import save
from pagedattn.viz.tables import draw_block_tables
from pagedattn.viz.walks import draw_walk
from pagedattn.viz.windows import WindowRecording

__all__ = [
    "Allocation",
    "ArenaRecording",
    "BeamTree",
    "Frame",
    "FreeOrder",
    "HitSearch",
    "Recording",
    "WindowRecording",
    "draw_allocations",
    "draw_beam_tree",
    "draw_block_sizes",
    "draw_block_tables",
    "draw_copy_on_write",
    "draw_fixed_point",
    "draw_free_queue",
    "draw_hash_chain",
    "draw_hit_rates",
    "draw_hit_search",
    "draw_holders",
    "draw_kernel_blocks",
    "draw_kv_growth",
    "draw_loads",
    "draw_memory",
    "draw_plan",
    "draw_policies",
    "draw_pool",
    "draw_pool_shares",
    "draw_rank_slots",
    "draw_roofline",
    "draw_shared_prefixes",
    "draw_shared_tables",
    "draw_sharing_saved",
    "draw_slot_mapping",
    "draw_walk",
    "draw_waste",
    "save",
]
