"""What a run will cost, before it starts: plan, calibrate and simulate."""
