"""What a machine takes, measured once and kept in files that later trainings read."""
