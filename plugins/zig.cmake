# Toolchain that compiles for ZIG_TARGET, e.g. aarch64-linux-gnu.2.28, anywhere: zig's C++ compiler, which brings the C
# library's headers and stubs of every version. ZIG_PYTHON is the Python that has the package ziglang.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ZIG_PYTHON ZIG_TARGET)
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${ZIG_TARGET}")
# -O3 in CMake's own trials too: zig compiles a C++ library for each level that it meets, and keeps it.
set(CMAKE_CXX_COMPILER ${ZIG_PYTHON} -m ziglang c++ -O3 -target ${ZIG_TARGET})
