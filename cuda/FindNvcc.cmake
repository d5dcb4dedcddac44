# Decides whether cuda/ is built: sets GEOMESH_CUDA_USABLE, enables the CUDA language, says one line.
#
# GEOMESH_BUILD_CUDA is AUTO (with nvcc if it works; if not, says why and goes on), ON (must work)
# or OFF. nvcc is tried by hand first, because enable_language ends the build where it can't compile.
set(GEOMESH_CUDA_USABLE OFF)
if(GEOMESH_BUILD_CUDA STREQUAL "OFF")
  message(STATUS "cuda: left out (GEOMESH_BUILD_CUDA is OFF)")
  return()
endif()
if(GEOMESH_BUILD_CUDA STREQUAL "AUTO")
  set(level WARNING)
else()
  set(level FATAL_ERROR)
endif()

find_program(GEOMESH_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME PATH_SUFFIXES bin PATHS /usr/local/cuda)
if(NOT GEOMESH_NVCC)
  if(level STREQUAL "WARNING")
    message(STATUS "cuda: left out, there is no nvcc; CUDA tensors go through the CPU's codec")
  else()
    message(FATAL_ERROR "cuda: GEOMESH_BUILD_CUDA is ${GEOMESH_BUILD_CUDA}, but there is no nvcc on the path")
  endif()
  return()
endif()

# Asked once for each compiler and list of architectures.
set(question "${GEOMESH_NVCC};${CMAKE_CXX_COMPILER};${GEOMESH_CUDA_ARCHITECTURES}")
if(NOT GEOMESH_NVCC_WORKS STREQUAL question)
  set(flags "")
  foreach(architecture ${GEOMESH_CUDA_ARCHITECTURES})
    string(REGEX MATCH "^[0-9]+[af]?" number ${architecture})
    list(APPEND flags -gencode "arch=compute_${number},code=compute_${number}")
  endforeach()
  set(probe ${PROJECT_BINARY_DIR}/nvcc_probe)
  file(WRITE ${probe}.cu "#include <bit>\n__global__ void Probe(float* x) { *x = 1; }\n")
  execute_process(COMMAND ${GEOMESH_NVCC} -std=c++20 -ccbin ${CMAKE_CXX_COMPILER} ${flags} -c ${probe}.cu
                          -o ${probe}.o
                  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(${level} "cuda: left out, ${GEOMESH_NVCC} can't compile for ${GEOMESH_CUDA_ARCHITECTURES}:\n${output}\n"
      "Set GEOMESH_CUDA_ARCHITECTURES to what it knows, install another toolkit, or set GEOMESH_BUILD_CUDA=OFF.")
    return()
  endif()
  set(GEOMESH_NVCC_WORKS "${question}" CACHE INTERNAL "")
endif()

set(CMAKE_CUDA_COMPILER ${GEOMESH_NVCC})
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
set(CMAKE_CUDA_ARCHITECTURES ${GEOMESH_CUDA_ARCHITECTURES})
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 doesn't know that nvcc takes C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit REQUIRED)
set(GEOMESH_CUDA_USABLE ON)
message(STATUS "cuda: built with ${GEOMESH_NVCC} ${CMAKE_CUDA_COMPILER_VERSION} for ${GEOMESH_CUDA_ARCHITECTURES}")
