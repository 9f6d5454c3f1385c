from wlb_megatron.packing.baselines import FixedGreedyPacker


class FixedSolverPacker(FixedGreedyPacker):
    name = "fixed-solver"
