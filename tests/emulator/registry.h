// The kernels that there are: the driver looks them up by name.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace emulator {

struct Kernel {
    std::string name;
    std::vector<size_t> parameters;
    unsigned cluster;
    // The kernel with arguments that are copied from these addresses.
    std::function<std::function<void()>(void**)> bind;
};

inline std::map<std::string, Kernel>& registry() {
    static std::map<std::string, Kernel> kernels;
    return kernels;
}

template <class... Args, size_t... I>
std::function<void()> bound(void (*kernel)(Args...), void** from, std::index_sequence<I...>) {
    return [kernel, args = std::tuple<std::remove_const_t<Args>...>(
                        *static_cast<std::remove_const_t<Args>*>(from[I])...)] {
        std::apply(kernel, args);
    };
}

struct Registration {
    template <class... Args>
    Registration(const char* name, unsigned cluster, void (*kernel)(Args...)) {
        const auto bind = [kernel](void** from) {
            return bound(kernel, from, std::index_sequence_for<Args...>());
        };
        registry()[name] = Kernel{name, {sizeof(Args)...}, cluster, bind};
    }
};

}  // namespace emulator
