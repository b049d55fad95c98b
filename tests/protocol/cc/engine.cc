// The explorer's engine, which knows nothing of the protocol.
#include "explorer.h"

template class explorer::EngineTemplate<void>;
