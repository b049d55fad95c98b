// Prints what each kernel asks for as dynamic shared memory, in bytes: "name bytes" a line;
// kernels without a line ask for none. Runs on the host alone.
#include <cstdio>

#include "flashmoe/kernel/gather.cuh"
#include "flashmoe/kernel/layer.cuh"
#include "flashmoe/kernel/plan_kernel.cuh"
#include "flashmoe/kernel/settle.cuh"

int main() {
    std::printf("gather_kernel %zu\n", sizeof(flashmoe::GatherSmem));
    std::printf("layer_kernel %d\n", flashmoe::kLayerSmemBytes);
    std::printf("plan_kernel %d\n", flashmoe::kPlanSmemBytes);
    std::printf("settle_kernel %zu\n", sizeof(flashmoe::SettleSmem));  // or its plan, if larger
    return 0;
}
