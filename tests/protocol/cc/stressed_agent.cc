// The steps of a launch on host threads: all of stress.cc that a mutant changes.
#include "host_atomics.h"

template class protocol_test::Agent<host::Atomics>;
