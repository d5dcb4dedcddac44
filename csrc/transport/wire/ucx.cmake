# wire/ucx, from the UCX under GEOMESH_UCX_DIR: the libucx-cu13 wheel's folder, or a system's prefix
# (1.13 or later). Sets the targets geomesh_ucx (UCX itself) and geomesh_wire_ucx.
find_path(GEOMESH_UCX_INCLUDE ucp/api/ucp.h PATHS ${GEOMESH_UCX_DIR}/include NO_DEFAULT_PATH)
foreach(part ucp ucs)
  find_library(GEOMESH_LIB${part} ${part} PATHS ${GEOMESH_UCX_DIR} NO_DEFAULT_PATH
               PATH_SUFFIXES lib lib64 lib/${CMAKE_LIBRARY_ARCHITECTURE})
endforeach()
if(NOT GEOMESH_UCX_INCLUDE OR NOT GEOMESH_LIBucp OR NOT GEOMESH_LIBucs)
  message(FATAL_ERROR "GEOMESH_UCX_DIR=${GEOMESH_UCX_DIR} has no include/ucp/api/ucp.h with "
                      "libucp and libucs: give the prefix of a UCX >= 1.13")
endif()

add_library(geomesh_ucx INTERFACE)
target_include_directories(geomesh_ucx SYSTEM INTERFACE ${GEOMESH_UCX_INCLUDE})
target_link_libraries(geomesh_ucx INTERFACE ${GEOMESH_LIBucp} ${GEOMESH_LIBucs})

set(wire ${CMAKE_CURRENT_LIST_DIR})
geomesh_library(geomesh_wire_ucx ${wire}/ucx.cc ${wire}/ucx_address.cc ${wire}/ucx_config.cc
                ${wire}/ucx_connect.cc ${wire}/ucx_log.cc ${wire}/ucx_worker.cc
                DEPS geomesh_wire_sockets geomesh_ucx absl::flat_hash_set ${CMAKE_DL_LIBS})

# The choice between wire/ucx and wire/tls.
geomesh_library(geomesh_wire ${wire}/choose.cc DEPS geomesh_wire_ucx geomesh_wire_tls)

set(tests ${PROJECT_SOURCE_DIR}/tests/cpp)
foreach(name ucx_wire_test ucx_process_test ucx_device_test)
  geomesh_test(${name} ${tests}/${name}.cc DEPS geomesh_wire_ucx)
endforeach()
geomesh_test(wire_choice_test ${tests}/wire_choice_test.cc DEPS geomesh_wire)
geomesh_test(ucx_engine_test ${tests}/ucx_engine_test.cc DEPS geomesh_transport geomesh_wire_ucx)

if(GEOMESH_BUILD_TESTS)
  add_executable(wires ${PROJECT_SOURCE_DIR}/benchmarks/wires.cc)
  target_link_libraries(wires PRIVATE geomesh_wire_ucx geomesh_wire_tls)
  add_executable(transport_peer ${PROJECT_SOURCE_DIR}/benchmarks/transport_peer.cc)
  target_link_libraries(transport_peer PRIVATE geomesh_transport geomesh_wire)
endif()
