// The explorer's engine, which knows nothing of the protocol.
#include "explorer.h"

namespace explorer {

template class EngineTemplate<void>;

namespace {

Engine& engine() { return *Engine::current(); }

}  // namespace

int Calls::add_word(const char* name, int index, int rank) {
    return engine().add_word(name, index, rank);
}
void Calls::name_word(int word, const char* name, int index) {
    engine().name_word(word, name, index);
}
int Calls::add_join(int threads) { return engine().add_join(threads); }
uint64_t Calls::perform(const Request& wanted) { return engine().perform(wanted); }
WaitEnd Calls::last_wait() { return engine().last_wait(); }
void Calls::fence(Scope scope) { engine().fence(scope); }
void Calls::release_fence(Scope scope) { engine().release_fence(scope); }
void Calls::fence_proxy_async() { engine().fence_proxy_async(); }
void Calls::bulk_wait_complete() { engine().bulk_wait_complete(); }
uint64_t Calls::read(int word, bool by_tma) { return engine().read(word, by_tma); }
void Calls::write(int word, uint64_t value, bool by_bulk) { engine().write(word, value, by_bulk); }
void Calls::arrive(int join, bool orders_copies) { engine().arrive(join, orders_copies); }
void Calls::forget(int place, int stage) { engine().forget(place, stage); }
void Calls::set_in_time(bool is_in_time) { engine().set_in_time(is_in_time); }
void Calls::count_ahead() { engine().count_ahead(); }
bool Calls::is_void() { return engine().is_void(); }
void Calls::fail(const char* message) { engine().fail(message); }
void Calls::refuse_index(int64_t index, size_t size) {
    engine().fail("index " + std::to_string(index) + " of " + std::to_string(size));
}

}  // namespace explorer
