// Prints what each kernel asks for as dynamic shared memory, in bytes: "name bytes" a line. Runs on
// the host alone. The plan's own launch is left out, since its need depends on the layer's shape.
#include <cstdio>

#include "flashmoe/kernel/gather.cuh"
#include "flashmoe/kernel/layer.cuh"

int main() {
    std::printf("gather_kernel %zu\n", sizeof(flashmoe::GatherSmem));
    std::printf("layer_kernel %zu\n", sizeof(flashmoe::LayerSmem));
    return 0;
}
