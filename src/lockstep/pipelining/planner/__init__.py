"""The planner: which layers go to which device, found by measuring, splitting and simulating."""
