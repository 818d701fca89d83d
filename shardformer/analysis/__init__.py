"""Plan, memory, collectives, verification and pictures: what a step takes and sends."""
