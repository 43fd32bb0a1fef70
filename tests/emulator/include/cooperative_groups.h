// What kernels/select_keys.cu uses of CUDA's header of this name.
#pragma once

namespace cooperative_groups {

struct Cluster {
    void sync() const { emulator::cluster_barrier(); }
    template <class T>
    T* map_shared_rank(T* mine, unsigned rank) const {
        return static_cast<T*>(emulator::in_block(mine, rank));
    }
};

inline Cluster this_cluster() { return {}; }

}  // namespace cooperative_groups
