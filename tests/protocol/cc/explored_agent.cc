// The steps of a launch under the explorer: all of explore.cc that a mutant changes.
#include "policy.h"

template class protocol_test::Agent<explorer::Atomics>;
