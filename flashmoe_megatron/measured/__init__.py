"""Times of a machine, measured once and kept in files that later trainings read."""
